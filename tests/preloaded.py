"""What most processes of the tests load first: once in the server that they are forked from."""

import git  # noqa: F401  # MLflow's, at the start of a run
import pytest  # noqa: F401  # of the tests whose functions they call
import sqlalchemy.dialects.sqlite  # noqa: F401  # of the store

import tests.integration.commands  # noqa: F401
from tests.config.fits import STATE_TRACKING
from vapo.config import FitConfig
from vapo.config.loading import load_config

load_config(FitConfig, STATE_TRACKING, [])  # what is read and noted of a schema at first
