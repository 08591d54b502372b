"""`python -m tiercel`."""

import sys

from tiercel.cli.main import main

sys.exit(main())
