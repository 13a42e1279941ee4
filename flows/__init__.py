"""What people start: the flows, and the `virnuc` command.

The module of a flow, such as `predict`, is a list of its steps: a plain function of its settings,
which never imports Prefect. `prefect_flows` makes the flows of Prefect of these functions.
"""
