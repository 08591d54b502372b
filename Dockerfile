# tiercel for NVIDIA GPUs. The machine needs NVIDIA's driver and container toolkit; torch's wheels bring CUDA's libraries.
#   docker build --tag tiercel .
#   docker build --tag tiercel --build-arg EXTRAS=data,rewards,deepspeed .
#   docker run --rm --gpus all --shm-size=8g --volume "$PWD:/work" tiercel grpo recipe.yaml

FROM python:3.12.12-slim-trixie AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY recipes recipes
COPY tiercel tiercel
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.12.12-slim-trixie
ARG EXTRAS=demo,data,hub,video,rewards,quantize,trackers
# torch.compile and Triton need a C compiler at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /dist /dist
COPY constraints.txt /dist/
# The versions that CI tests.
# hadolint ignore=DL3013
RUN wheel="$(echo /dist/*.whl)" \
    && pip install --no-cache-dir --constraint /dist/constraints.txt "${wheel}[${EXTRAS}]" \
    && useradd --create-home --uid 1000 tiercel \
    && install --directory --owner=tiercel /work
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["tiercel"]
CMD ["--help"]
