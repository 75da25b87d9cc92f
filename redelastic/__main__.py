"""``python -m redelastic``: the ``redelastic`` command where scripts are not on PATH."""

import sys

from redelastic.cli import main

sys.exit(main())
