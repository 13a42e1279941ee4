"""When and where the flows run: `prefect.yaml`, and how to run a server and workers."""
