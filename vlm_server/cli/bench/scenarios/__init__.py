"""What servers are asked: scenarios, and the images and words in them."""
