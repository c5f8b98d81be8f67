"""`python -m pgqueue` is `pgqueue`."""

from pgqueue.cli import main

if __name__ == "__main__":
    main()
