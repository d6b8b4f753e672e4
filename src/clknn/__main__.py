"""`python -m clknn` is `clknn`."""

from clknn.cli import main

if __name__ == "__main__":
    main()
