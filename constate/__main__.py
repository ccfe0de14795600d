"""`python -m constate`: the same as the command `constate`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
