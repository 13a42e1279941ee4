# docker build -t virnuc .                                  the command: docker run --gpus all … virnuc predict …
# docker build -t virnuc-worker --target worker .           a Prefect worker: docker run --gpus all -e PREFECT_API_URL=… virnuc-worker
# docs/how-to/containers.md shows both. The default stage is the last one.

# The base image. Of it we use the hooks of the driver and a Python: torch's packages bring CUDA's libraries.
# A tag can be moved to another image, a digest cannot. `make image` looks the digest up and gives
# BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:…
ARG BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE_IMAGE} AS common

# Triton builds a small module when it first meets a GPU: for that gcc and Python's headers.
# Ubuntu keeps only the newest version of a package, so versions in this line would soon not install.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-venv python3.12-dev gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home virnuc \
    && python3.12 -m venv /opt/venv

WORKDIR /opt/virnuc
COPY pyproject.toml README.md LICENSE* ./
COPY flows flows
COPY tasks tasks
COPY virnuc_core virnuc_core
COPY deployments deployments
COPY src src
# pip compares every download with its recorded hash. The file lists all packages, so pip resolves nothing.
# virnuc itself is built from the copied folders.
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r deployments/requirements.txt \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps .

ENV PATH=/opt/venv/bin:$PATH \
    VIRNUC_MODELS=/srv/virnuc/models \
    VIRNUC_ROOTS=/srv/virnuc \
    PREFECT_SERVER_ANALYTICS_ENABLED=false

ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE_URL=unknown
LABEL org.opencontainers.image.title="virnuc" \
      org.opencontainers.image.description="Which short sequencing reads are viral, by VirNucPro's method" \
      org.opencontainers.image.authors="The virnuc authors" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE_URL}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"

# The user virnuc. Kubernetes can tell that a number is not root, but not that a name is not.
USER 10001
WORKDIR /home/virnuc

# A Prefect worker, which takes runs from a work pool until it is stopped
FROM common AS worker
# The worker answers at this address whether it still asks the server for runs. Nobody else can reach it.
ENV PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1 \
    PREFECT_WORKER_WEBSERVER_PORT=8080
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-m", "virnuc.deployments.worker_health"]
ENTRYPOINT ["tini", "--", "prefect", "worker", "start", "--with-healthcheck"]
CMD ["--pool", "gpu", "--limit", "1"]

# The command, which ends with its run: Docker sees its exit code, so there is no health to ask for
FROM common AS command
HEALTHCHECK NONE
# tini hands signals on and collects what worker processes leave, as process 1 must
ENTRYPOINT ["tini", "--", "virnuc"]
CMD ["--help"]
