"""What most forked processes need: loaded before the server that they are forked from begins."""

import git  # noqa: F401  # MLflow's, at the start of a run
import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import sqlalchemy.dialects.sqlite  # noqa: F401  # of the store
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import tests.integration.commands  # noqa: F401
import vapo.commands.fit  # noqa: F401
from tests.config.fits import STATE_TRACKING
from vapo.config import FitConfig
from vapo.config.loading import load_config

load_config(FitConfig, STATE_TRACKING, [])  # what is read and noted of a schema at first
