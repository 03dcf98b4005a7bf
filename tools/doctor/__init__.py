"""The checks of `baton doctor`: of this machine and its configuration, and of the running cluster, if one answers.

`catalogue` lists the checks, `check` runs them, each within a time limit, and `subject` is what they look at. This
process loads neither Ray nor torch: programs of their own (`bounded`) report what only those know.
"""
