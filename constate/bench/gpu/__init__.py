"""The measurement of one GPU: what is right on it, then how fast, in a given number of seconds.

`run` asks, `worker` answers in a process of its own, so that a kernel that breaks the device or hangs costs
one answer and not the rest. `plan` says what is asked, and in which order; `checks`, `scans`, `peers` and
`models` are what is done.
"""
