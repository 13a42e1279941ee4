"""The flows of Prefect, one module for each.

A module has what Prefect shows and uses of its flow: its name, the names of its runs, and its
parameters. The steps are a plain function in the module of the same name in `virnuc.flows`, which
does not import Prefect. Without a server the command calls that function itself.

Deployments name a flow by its place here, such as `virnuc.flows.prefect_flows.predict.predict`.
"""
