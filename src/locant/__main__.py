from locant.cli import app

app()
