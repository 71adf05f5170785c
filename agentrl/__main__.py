"""`python -m agentrl` is `agentrl`."""

import sys

from agentrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
