"""``python -m recipes.gpu``."""

import sys

from recipes.gpu.run import main

sys.exit(main())
