"""What every dialect needs of HTTP; knows none of them."""
