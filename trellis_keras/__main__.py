from trellis_keras_cli.commands import main

main()
