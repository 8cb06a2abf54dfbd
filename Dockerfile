# This checkout, built, on the CPU; with the host's driver (`docker run --gpus all`) also on a GPU:
#   docker build -t vtensor . && docker run --rm vtensor
# scripts/fresh_debian.sh runs the same steps without Docker.
FROM debian:trixie-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes ca-certificates python3-venv python3-dev g++ make git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 vtensor

USER 1000
COPY --chown=1000 . /home/vtensor/vtensor
WORKDIR /home/vtensor/vtensor
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1
RUN scripts/venv.sh demo && scripts/build.sh

CMD ["make", "demo"]
