"""`python -m turbofs.bench SCENE …` is `turbofs bench SCENE …`; a run starts itself so inside its namespaces."""

import sys

from turbofs.cli.app import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
