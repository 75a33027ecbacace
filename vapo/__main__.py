"""`python -m vapo`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    # Python has put the current folder first. There it would hide the library's own modules by
    # files of the user's with the same names; the `vapo` command does not look into it, either.
    sys.path.append(sys.path.pop(0))

from vapo.cli import main

sys.exit(main())
