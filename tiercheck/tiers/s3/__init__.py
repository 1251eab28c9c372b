"""S3 and what speaks its protocol: ``s3://bucket/prefix``. Importing this imports aiobotocore."""

from tiercheck.tiers.s3.driver import S3Driver
from tiercheck.tiers.s3.settings import S3Settings

__all__ = ["S3Driver", "S3Settings"]
