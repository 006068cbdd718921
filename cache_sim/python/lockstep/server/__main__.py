import sys

from lockstep.server import command

sys.exit(command.main(sys.argv[1:]))
