"""`python3 -m lab …` from guest-images/; run-vm.sh is the way in."""

import sys

from .main import main

sys.exit(main(sys.argv[1:]))
