"""`python -m remesh`: the command line, where the script `remesh` is not on the path."""

from remesh.cli import main

if __name__ == "__main__":
    main()
