# docker build -t virnuc .
# docker run --gpus all -v /srv/virnuc:/srv/virnuc virnuc predict /srv/virnuc/reads.fastq.gz -o /srv/virnuc/run --models /srv/virnuc/models
# The wheels of torch bring CUDA's libraries; of the base image the driver's hooks and a Python are what is used. Triton
# builds a small module of its own when it first meets a GPU: for that gcc and Python's headers.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

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
USER virnuc
WORKDIR /home/virnuc
# tini hands signals on and collects what worker processes leave, as process 1 must
ENTRYPOINT ["tini", "--", "virnuc"]
CMD ["--help"]
