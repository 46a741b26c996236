"""lit-transformer COMMAND ..., also as python -m lit_transformer."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from lit_transformer.signals import Stopped

COMMANDS = {
    "prepare": "text to a tokenised store, with a report of what was dropped",
    "plan": "what one run will take, before it trains: memory, FLOPs, hours",
    "fit": "train one run, or go on with it; ends with its result.json",
    "validate": "score a run's validation split",
    "test": "score a run's test split",
    "translate": "one line out for each line in",
    "average": "average a run's newest checkpoints",
    "sweep": "run a study: all its variants and seeds",
    "results": "table, plots and report of a study; or two runs compared",
}
USAGE = "usage: lit-transformer COMMAND [...]\n\ncommands (each explains itself with --help):\n" + "".join(
    f"  {name:<10} {text}\n" for name, text in COMMANDS.items()
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        args: as typed, without the program's name; sys.argv's when not given.

    Returns:
        Exit status: 0 done or nothing left to do, 1 could not be done, 2 wrongly called, 128 and its number
        where a signal ended it (130: Ctrl-C).
    """
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if args else 2
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        print(f"lit-transformer: there is no command {command!r}\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        return _run(command, rest)
    except BrokenPipeError:
        return 1  # whoever read our output has had enough
    except (ValueError, RuntimeError, OSError) as error:
        if type(error) is RuntimeError:
            raise  # a fault of ours or of a library: the traceback is the message
        print(f"lit-transformer {command}: error: {_one_line(error)}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"lit-transformer {command}: {stopped}", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print(f"lit-transformer {command}: interrupted; the same command goes on", file=sys.stderr)
        return 130


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{text}: the disk is full; free some space and type the same command again"
    return text


def _run(command: str, args: list[str]) -> int:
    # Imported here: the results of a study need no torch, and --help no second.
    if command == "results":
        from lit_transformer import results

        return results.results_command(args)
    if command == "sweep":
        from lit_transformer import sweep

        return sweep.sweep_command(args)
    from lit_transformer import commands

    commands.quiet()
    if command in ("validate", "test", "average"):
        from lit_transformer import score_runs

        if command == "average":
            return score_runs.average_command(args)
        return score_runs.evaluate_command("valid" if command == "validate" else "test", args)
    if command == "plan":
        from lit_transformer import forecast

        return forecast.plan_command(args)
    return {
        "prepare": commands.prepare_command,
        "fit": commands.fit_command,
        "translate": commands.translate_command,
    }[command](args)


if __name__ == "__main__":
    sys.exit(main())
