# splitjax with JAX for NVIDIA GPUs. The machine needs NVIDIA's driver and its container toolkit; CUDA comes with JAX's wheels.
#
#   docker build -f docker/gpu.Dockerfile -t splitjax .
#   docker run --rm --gpus all splitjax doctor
#   docker run --rm --gpus all --shm-size 8g -v "$PWD":/work splitjax train --platform auto --mesh data=2,model=4 --checkpoint-dir run
FROM python:3.12-slim

COPY . /opt/splitjax
# One layer, without the packages' archives: the image is large enough.
RUN pip install --no-cache-dir '/opt/splitjax[gpu,demo]' && rm -rf /opt/splitjax

# JAX takes three quarters of a GPU's memory at once; in a container it shares with nobody.
ENV XLA_PYTHON_CLIENT_MEM_FRACTION=.9
# Compiled programs stay where a volume can keep them.
ENV SPLITJAX_CACHE=/var/cache/splitjax
WORKDIR /work
ENTRYPOINT ["splitjax"]
CMD ["doctor"]
