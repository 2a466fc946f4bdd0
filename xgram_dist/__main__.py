import sys

from xgram_dist.cli.main import main

sys.exit(main())
