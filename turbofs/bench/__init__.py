"""Benchmarks, one file a scene: TurboFS and its baselines side by side, in one run, by one reader or writer.

`turbofs bench SCENE` prints a table for people and, as its last line, one JSON object. docs/BENCHMARKS.md says what
each row means and how it is kept fair.

- `command`   the command: options, the private namespaces, the exit code
- `harness`   rows and bars, interleaved rounds, medians, the table, the JSON line
- `isolation` mount and PID namespaces of the run's own, so that nothing is left behind
- `services`  what is measured: HDFS, our mount, rclone's, the in-memory file
- `sampling`  a daemon's memory while something else happens
- `read`      the scene `read`: `datasets` makes its files, `readers` reads them, the same code for every contestant
- `write`     the scene `write`, with `write_setting` (sizes and services) and `write_daemon` (recovery, memory):
  `payload` makes its bytes, `writers` writes them in a process of their own (`writer_process`), `checks` compares
"""
