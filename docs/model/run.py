"""Check the models: right protocols must hold, seeded bugs must be caught. Exit code 1 if one does not.

python docs/model/run.py              a few minutes
python docs/model/run.py --quick      seeded bugs and the smallest right protocols, two minutes
python docs/model/run.py --full       also the largest spaces, longer
python docs/model/run.py --verbose    with the counterexample of each bug
python docs/model/run.py --only TEXT  the checks whose name contains TEXT, whatever their size
python docs/model/run.py --list       no check, only which bugs are seeded and what each of them breaks
"""

import argparse
import sys

import consumer_checks
import failover_checks
import lease_checks
import lease_early_checks
import lease_hand_over_checks
import lease_two_checks
import reads_checks
from check import FULL, NORMAL, QUICK, Check
from explore import HOLDS, VIOLATED, Result, explore, walk

_CHECKS = {
    "lease": lease_checks.BUGS
    + lease_two_checks.BUGS_OF_TWO
    + lease_hand_over_checks.BUGS_OF_HAND_OVER
    + lease_early_checks.BUGS_OF_EARLY
    + lease_checks.RIGHT
    + lease_two_checks.RIGHT_OF_TWO
    + lease_hand_over_checks.RIGHT_OF_HAND_OVER
    + lease_early_checks.RIGHT_OF_EARLY,
    "reads": reads_checks.BUGS + reads_checks.RIGHT,
    "failover": failover_checks.BUGS_OF_FAILOVER + failover_checks.RIGHT_OF_FAILOVER,
    "consumer": consumer_checks.BUGS_OF_CONSUMERS + consumer_checks.RIGHT_OF_CONSUMERS,
}
_STEPS_PER_WALK = 300


def main() -> int:
    """Run the checks that the command line asks for; the number of those that went wrong decides the exit code."""
    options = _options()
    if options.list:
        for check in (check for checks in _CHECKS.values() for check in checks if check.breaks):
            print(f"{check.name} | {check.breaks}")
        return 0
    tier = QUICK if options.quick else FULL if options.full or options.only else NORMAL
    tally = {True: [0, 0], False: [0, 0]}  # seeded bug or not: as expected, all
    for model, checks in _CHECKS.items():
        for check in checks:
            if check.tier > tier or options.only not in check.name:
                continue
            result = _run(check)
            good = _as_expected(check, result)
            tally[bool(check.breaks)][0] += good
            tally[bool(check.breaks)][1] += 1
            print(_line(model, check, result, good), flush=True)
            if result.trace and (options.verbose or not good):
                print("".join(f"            {label}\n" for label in result.trace), end="", flush=True)
    caught, bugs = tally[True]
    held, right = tally[False]
    print(f"{caught} of {bugs} seeded bugs caught, {held} of {right} right protocols hold")
    return int(caught < bugs or held < right)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check the models of the protocols.")
    parser.add_argument("--quick", action="store_true", help="seeded bugs and the smallest right protocols")
    parser.add_argument("--full", action="store_true", help="also the largest state spaces")
    parser.add_argument("--verbose", action="store_true", help="print the counterexample of each bug")
    parser.add_argument("--only", default="", metavar="TEXT", help="only checks whose name contains this")
    parser.add_argument("--list", action="store_true", help="list the seeded bugs and what each breaks, check nothing")
    return parser.parse_args()


def _run(check: Check) -> Result:
    if check.walks:
        return walk(check.model(), check.walks, _STEPS_PER_WALK)
    return explore(check.model(), check.limit)


def _as_expected(check: Check, result: Result) -> bool:
    if check.breaks:
        return result.verdict == VIOLATED and result.reason.startswith(check.breaks)
    return result.verdict == HOLDS


def _line(model: str, check: Check, result: Result, good: bool) -> str:
    if check.breaks:
        verdict = "caught" if good else "MISSED"
    else:
        verdict = "holds" if good else "FAILS"
    size = f"{result.states} {'steps' if check.walks else 'states'}, {result.seconds:.1f} s"
    reason = f"  {result.reason}" if result.reason else "" if good else f"  {result.verdict}"
    return f"{verdict:7} {model}  {check.name:59} {size:>23}{reason}"


if __name__ == "__main__":
    sys.exit(main())
