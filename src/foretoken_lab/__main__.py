"""python -m foretoken_lab"""

from foretoken_lab.cli import main

main()
