"""What is torch's: its launcher, its agent's regrouping, its exchange of roles and its exit barrier."""
