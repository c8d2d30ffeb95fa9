"""`python -m nodeagent`."""

import sys

from nodeagent.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
