"""What `baton doctor` looks at: this machine and its configuration, and the cluster that runs, if one answers.

`catalogue` lists the checks, `examination` runs them, each bounded in time; `findings` is what they say. A check takes
a `Subject` and yields findings; it changes nothing and leaves nothing behind. Needs neither Ray nor torch in this
process: what only those know is asked of programs of their own (`programs`).
"""
