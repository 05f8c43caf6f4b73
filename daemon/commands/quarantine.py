"""``rallypoint quarantine``: slots whose workers crash again and again, and letting them start."""

import argparse
import json
from typing import Any, Final

from rallypoint.daemon.commands.client import AdminClient, add_dir


class QuarantineCommand:
    """Asks the supervisor of a directory. Exit code 3 when none answers."""

    help: Final = "list or clear slots in quarantine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        listing = actions.add_parser("list", help="show the slots in quarantine, of all nodes")
        add_dir(listing)
        listing.add_argument("--json", action="store_true", help="one JSON array, for scripts")
        clearing = actions.add_parser("clear", help="let slots start again at once")
        add_dir(clearing)
        clearing.add_argument("--node", metavar="NAME", help="of this node, not of the one asked")
        clearing.add_argument("--slot", type=int, metavar="N", help="only this slot")
        clearing.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Print; exit code 0, or 1 when the node or slot to clear is not in quarantine."""
        with AdminClient(args.dir) as client:
            if args.action == "list":
                slots = client.ask(command="quarantine")["quarantined"]
                print(json.dumps(slots) if args.json else _text(slots))
                return 0
            wanted = {"node": args.node, "slot": args.slot}
            cleared = client.ask(command="quarantine_clear", **wanted)["cleared"]
        named = [f"{what} {value}" for what, value in wanted.items() if value is not None]
        if args.json:
            print(json.dumps({"cleared": cleared}))
            return 1 if named and not cleared else 0
        if named and not cleared:
            print(f"{', '.join(named)}: not in quarantine")
            return 1
        print("cleared: " + (", ".join(map(str, cleared)) or "none was in quarantine"))
        return 0


def _text(slots: list[dict[str, Any]]) -> str:
    return "\n".join(map(_line, slots)) or "no slot is in quarantine"


def _line(slot: dict[str, Any]) -> str:
    if slot["cause"] == "flapping":
        why = f"its node flaps: {slot['reason']}"
    elif slot["failures"] is None:
        why = "its lives failed in a row; its own node knows more"
    else:
        why = f"{slot['failures']} lives failed in a row, the last one {slot['reason']}"
    left_s = slot["seconds_left"]
    left = "" if left_s is None else f"; next try in {left_s:.0f} s"
    return f"{slot['node']}/{slot['slot']}: {why}{left}"


COMMAND = QuarantineCommand()
