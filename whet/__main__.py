"""The command `whet`, and `python -m whet`. An interrupt while PyTorch is still being imported ends it without a traceback."""

import sys


def main() -> None:
    try:
        from whet.commands import main as command
    except KeyboardInterrupt:
        print("whet: stopped; nothing was begun yet", file=sys.stderr)
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
