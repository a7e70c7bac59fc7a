"""`python -m sakuradite`: the same program as `sakuradite`."""

from sakuradite.cli import main

if __name__ == "__main__":
    main()
