"""What keys, tokens and passwords look like, each with a sentence that holds it; all are made up."""

from __future__ import annotations

import random
import string

CHOICE, WORDS, HEX = random.Random(0), string.ascii_letters + string.digits, "0123456789abcdef"


def some(characters: int, of: str = WORDS) -> str:
    return "".join(CHOICE.choices(of, k=characters))


COMMIT = some(40, HEX)
JWT = f"eyJ{some(30)}.eyJ{some(60)}.{some(43)}"
PEM = [some(64), some(64), some(20)]
BASE64 = some(86) + "=="
SHAPES = {
    "W&B": (some(40, HEX), "wandb: ERROR API key {}; wandb login {}; {}"),
    "W&B local": (some(40, HEX), "local-{}"),
    "W&B v1": ("wandb_v1_" + some(77), "cannot use {}"),
    "AWS temporary id": ("ASIA" + some(16, string.ascii_uppercase), "The Access Key Id {} does not exist"),
    "AWS secret": (some(40), "AWS_SECRET_ACCESS_KEY={} aws_session_token = {}, secret access key: {}"),
    "service account": (some(40, HEX), '{{"type": "service_account", "private_key_id": "{}"}}'),
    "Amazon's signature": (some(64, HEX), "https://b.s3.amazonaws.com/o?X-Amz-Date=1&X-Amz-Signature={}&x=1"),
    "Google's signature": (some(64, HEX), "https://storage.googleapis.com/b?X-Goog-Signature={}"),
    "SAS": (some(43) + "%3D", "https://a.blob.core.windows.net/c?sp=r&sig={} SharedAccessSignature=sp=r&sig={}"),
    "Azure storage": (BASE64, "AccountName=a;AccountKey={};EndpointSuffix=core.windows.net"),
    "kubectl": ("hunter2", "kubectl create secret generic x --from-literal=token={}"),
    "Slack": ("xoxb-123456789012-1234567890123-" + some(24), "slack {}"),
    "Slack app": ("xapp-1-A012-1234-" + some(40, HEX), "slack {}"),
    "Slack webhook": ("T0123456/B0123456/" + some(24), "POST https://hooks.slack.com/services/{} failed"),
    "JWT": (JWT, "SLURM_JWT={} X-SLURM-USER-TOKEN: {} and {}"),
    "MUNGE": ("MUNGE:AwQD" + some(80) + ":", "credential {}"),
    "NVIDIA": ("nvapi-" + some(64), "401 for {}"),
    "NGC of old": (some(84), "docker login nvcr.io -u '$oauthtoken' -p {}; NGC_API_KEY={}"),
    "kaggle": (some(32, HEX), "KAGGLE_KEY={}"),
    "user and password": ("hunter2", "http://ada:{}@proxy:3128 postgresql://u:{}@db/mlflow"),
    "Basic": ("YWRhOmh1bnRlcjI=", "Authorization: Basic {}"),
    "Bearer": (some(30), "authorization: bearer {}, X-Api-Key: {}, {{'Authorization': 'Bearer {}'}}"),
    "header of any scheme": (
        some(30),
        "Authorization: ApiKey {}, HTTP_AUTHORIZATION=Token {}; curl -H 'Authorization: GenieKey {}' "
        "{{'Proxy-Authorization': 'Digest username=\"ada\", response=\"{}\"'}} ('authorization', 'Custom-1 {}')",
    ),
    "behind -p": (
        "hunter2",
        "mysql -uada -p{} -h db; mysqldump -u ada --opt -p'{}' x; ['mariadb', '-p{}'] mongosh -u ada -p {}; "
        "sshpass -p {} ssh gpu-1; sshpass -p{} scp",
    ),
    "in a URL's query": ("hf_" + some(34), "GET /login?next=%2Fapi%3Fx%3D{}%26user%3Dada"),
    "curl": ("hunter2", "curl -u ada:{} --proxy-user ada:{}"),
    "password": ("hunter2", "--password {} --password={} PASSWORD={} PGPASSWORD='{}' DB_PWD={} password: {}"),
    "SendGrid": (f"SG.{some(22)}.{some(43)}", "{}"),
    "in colour": ("hf_" + some(34), "\x1b[31m{}\x1b[0m"),
    "with a sign that nobody sees": ("hunter2", "PASSWORD\u200b={}"),
    **{
        begin: (begin + some(length), "rank 1: RuntimeError: {} was refused")
        for begin, length in (
            *(("hf_", 34), ("ghp_", 36), ("ghs_", 36), ("github_pat_", 82), ("glpat-", 20), ("npm_", 36), ("AIza", 35)),
            *(("ya29.", 60), ("GOCSPX-", 28), ("sk-ant-api03-", 90), ("sk-proj-", 90), ("sk-", 48), ("gsk_", 52)),
            *(("pypi-AgEIcHlwaS5vcmc", 90), ("dckr_pat_", 27), ("xai-", 80), ("pplx-", 48), ("tgp_v1_", 43)),
            *(("hvs.", 24), ("KGAT_", 32), ("sk_live_", 24)),
        )
    },
}
