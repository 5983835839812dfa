# An image of the checkout, with the versions of the libraries that its tests use.
#
#     docker build -t mingpt_ddp .
#     docker build -t mingpt_ddp --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .   # without CUDA
#     docker run --rm -v "$PWD/outputs:/runs" mingpt_ddp python main.py experiment=demo run.root=/runs
FROM python:3.12-slim
# pip reads this variable. It is not part of the image.
ARG PIP_EXTRA_INDEX_URL
# torch looks up the name of its user, so the user needs one.
RUN useradd --uid 1000 --create-home mingpt
WORKDIR /app
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[s3]'
USER 1000
CMD ["python", "main.py", "--help"]
