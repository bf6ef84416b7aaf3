"""Benchmarks, one file a scene: TurboFS and its baselines side by side, in one run, by one reader.

`turbofs bench SCENE` prints a table for people and, as its last line, one JSON object. docs/BENCHMARKS.md says what
each row means and how it is kept fair.

- `command`   the command: options, the private namespaces, the exit code
- `harness`   rows and bars, interleaved rounds, medians, the table, the JSON line
- `isolation` mount and PID namespaces of the run's own, so that nothing is left behind
- `services`  what is measured: HDFS, our mount, rclone's, the in-memory file
- `datasets`  the files that are read
- `readers`   how they are read: the same code for every contestant
- `read`      the scene `read`
"""
