"""The page at `/`: the cluster as one router sees it, for people, and the split of the workers for an admin.

One file of HTML without data (`page.html`), and the JSON that it asks for once a second. What is shown is what
`StatusService` tells; what is changed goes to the controller's `AdminService`, with the key of whoever asks.
"""
