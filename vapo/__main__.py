"""`python -m vapo`."""

import sys

from vapo.cli import main

sys.exit(main())
