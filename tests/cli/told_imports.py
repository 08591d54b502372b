"""Run a command of tiercel, and print the packages that its process has imported at the end of stderr."""

import sys

from tiercel.cli.main import main

if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    finally:
        print("imported:", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
    sys.exit(code)
