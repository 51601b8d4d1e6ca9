"""bench placeholder"""

import argparse

HELP = "measure"


def add_arguments(command: argparse.ArgumentParser) -> None: ...
def run(options: argparse.Namespace) -> None: ...
