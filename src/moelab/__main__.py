"""``python -m moelab`` is the command ``moelab``."""

import sys

from moelab.cli import main

sys.exit(main())
