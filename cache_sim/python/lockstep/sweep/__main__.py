import sys

from lockstep.sweep.command import main

sys.exit(main(sys.argv[1:]))
