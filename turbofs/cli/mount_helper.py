"""`mount.turbofs SOURCE DIR [-sfnv] [-o OPT,…]`: what mount(8) calls for `mount -t turbofs` and for fstab lines.

hdfs://namenode/models  /mnt/models  turbofs  _netdev,ro,memory=8GiB,wait=2m  0 0
"""

from __future__ import annotations

import argparse
import sys

from turbofs.cli import working_directory
from turbofs.cli.failures import error_text, exit_code, only_turbo_error


def main(arguments: list[str] | None = None) -> None:
    """Mount as mount(8) asks; exits as `turbofs mount` does."""
    parser = argparse.ArgumentParser(prog="mount.turbofs", description="Called by mount -t turbofs.")
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="OPT,…")
    parser.add_argument("-f", dest="fake", action="store_true", help="check everything, mount nothing")
    parser.add_argument("-s", dest="sloppy", action="store_true", help="accepted; unknown options are still refused")
    parser.add_argument("-n", dest="no_mtab", action="store_true", help="accepted; there is no mtab to write")
    parser.add_argument("-v", dest="verbose", action="store_true", help="accepted")
    parser.add_argument("-t", dest="kind", default="turbofs", help="accepted; always turbofs")
    chosen = parser.parse_args(arguments)
    working_directory.leave_if_lost()
    try:
        mount_from_options(chosen.source, chosen.directory, chosen.options, fake=chosen.fake)
    except Exception as error:
        cause = only_turbo_error(error)
        if cause is None:
            raise
        print(error_text(cause), file=sys.stderr)
        sys.exit(exit_code(cause))


def mount_from_options(source: str, directory: str, options: list[str], *, fake: bool = False) -> None:
    """Mount with `-o` *options*; `config=FILE` among them names a TOML file. *fake* only checks. Raises TurboError."""
    from pathlib import Path

    from turbofs import settings
    from turbofs.cli import mount

    parts = [part for text in options for part in text.split(",")]
    files = [Path(part.removeprefix("config=")) for part in parts if part.startswith("config=")]
    others = [part for part in parts if not part.startswith("config=")]
    config = mount.load_config(settings.flag_values(source=source), others, files[-1] if files else None, directory)
    if fake:
        mount.check(config)
    else:
        mount.mount(config, foreground=False)


if __name__ == "__main__":
    main()
