"""`python -m aglite.worker --socket PATH`."""

from aglite.worker.main import main

if __name__ == "__main__":
    main()
