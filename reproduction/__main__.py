"""python -m reproduction"""

from reproduction.cli import main

main()
