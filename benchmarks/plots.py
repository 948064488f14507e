"""Draw the plots and write the tables of ``docs/benchmarks.md`` from the committed results.

    python -m benchmarks.plots [NAME …]

The same results give the same files, byte for byte, with the same version of matplotlib. If you give names, the script
draws only these plots. It always writes the tables of all results.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.reporting.catalogue import CATALOGUE, DOCUMENT, PLOTS_FOLDER
from benchmarks.reporting.document import ROOT, UnreadableResultsError
from benchmarks.reporting.markers import with_blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="draw only these plots")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {entry.name for entry in CATALOGUE}:
        parser.error(
            f"no such results: {', '.join(sorted(unknown))}; choose from {', '.join(entry.name for entry in CATALOGUE)}"
        )
    PLOTS_FOLDER.mkdir(exist_ok=True)
    try:
        blocks = {entry.name: entry.block() for entry in CATALOGUE}
        for entry in CATALOGUE:
            if not arguments.names or entry.name in arguments.names:
                entry.plot_path.write_text(entry.plot())
                print(entry.plot_path.relative_to(ROOT))
    except UnreadableResultsError as error:
        print(error, file=sys.stderr)
        return 1
    DOCUMENT.write_text(with_blocks(DOCUMENT.read_text(), blocks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
