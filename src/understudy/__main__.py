"""`python -m understudy` is the `understudy` command."""

import sys

from understudy.cli import main

sys.exit(main())
