"""`python -m clknn`, and `clknn`: the command line, which can be interrupted while it is still being imported."""

import sys


def main() -> None:
    try:
        from clknn import cli

        cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("clknn: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
