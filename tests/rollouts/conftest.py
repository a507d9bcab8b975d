"""Where the helpers of other rooms' tests are."""

import sys
from pathlib import Path

for folder in ("helpers", "gateway"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
